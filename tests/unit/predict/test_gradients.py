"""When gradients are ready: all of the model, inside its backward, in order."""

import numpy as np
import pytest

from foreshard import api
from foreshard.errors import SpecError
from foreshard.predict.gradients import backward_pass, block_tensors


def made(model, cluster="2x8xa100-sxm-80gb", **choices):
    request = api.request(api.load_model(model), api.load_cluster(cluster), zero=0, **choices)
    return request, backward_pass(request.model, request.cluster, request.to_plan(), 4.0)


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2", "bert-large", "mixtral-8x7b", "deepseek-v2-lite"])
def test_tensors_of_a_block_are_all_of_it(model):
    for block, _ in api.load_model(model).block_kinds():
        assert sum(size for _, size in block_tensors(block)) == block.num_params
        assert all(size > 0 for _, size in block_tensors(block))


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2", "bert-large"])
def test_gradients_are_those_of_the_model(model):
    request, found = made(model)
    assert found.gradients.num_bytes.sum() == pytest.approx(4 * request.model.num_params, rel=0.01)
    assert found.num_replicas == 16 and found.reduce_s(2**20) > 0
    assert len(found.gradients.names) == len(set(found.gradients.names)) == len(found.layers)


def test_gradients_come_in_order_and_within_the_backward():
    request, found = made("llama3-8b", global_batch=64)
    ready = found.gradients.ready_s
    assert np.all(np.diff(ready) >= 0) and ready[-1] == pytest.approx(found.gradients.backward_s)
    assert found.gradients.names[0] == "head" and found.gradients.names[-1] == "embedding"
    # The step holds four such micro-batches, each a forward and a backward.
    both = sum(layer.forward_s + layer.backward_s for layer in found.layers)
    parts = request.predict().time_breakdown_s
    assert 4 * both == pytest.approx(parts["compute"] + parts["recompute"] + parts["host"], rel=0.05)


def test_a_pipeline_has_no_buckets_of_a_whole_model():
    with pytest.raises(SpecError, match="pipeline"):
        made("llama3-8b", pp=2)
