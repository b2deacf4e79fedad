"""What a prediction is asked for: words that are unknown lead to those that are known."""

from __future__ import annotations

import pytest

from foreshard import api
from foreshard.errors import SpecError
from foreshard.predict.measured.costs import load_costs


def test_an_unknown_cost_source_leads_to_the_file_of_calibrate():
    model, cluster = api.load_model("gpt2"), api.load_cluster("1x1xh100-sxm")
    with pytest.raises(SpecError, match="or the file that foreshard calibrate writes"):
        api.predict(model, cluster, costs="guess")


@pytest.mark.parametrize(
    ("text", "said"), [("{}", "missing key 'kind'"), ("", "the file is empty"), ("[]", "calibrate")]
)
def test_what_are_no_measured_costs_names_file_and_way_out(tmp_path, text, said):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=said) as caught:
        load_costs(str(path))
    assert caught.value.file == str(path) and caught.value.rule and "calibrate" in caught.value.fix
