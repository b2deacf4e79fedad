"""Networks of words and tables: parameters and FLOPs are those of the papers and of their training code."""

import math
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from foreshard.profile.networks.catalog import is_mixed, network, network_name
from foreshard.profile.networks.language.transformer_xl import CUTOFFS, SHARES, VOCAB
from foreshard.profile.tracing.trace import trace_module


def encoder(width, blocks):
    """BERT with its pooling layer: three tables and a norm, blocks of 12 width^2, 30,528 pieces of words."""
    tables = (30_528 + 512 + 2) * width + 2 * width
    return tables + blocks * (12 * width**2 + 13 * width) + width**2 + width


def masked_words(width, blocks):
    """Its heads: a layer, a norm and a bias for each word; two classes."""
    return encoder(width, blocks) + width**2 + 3 * width + 30_528 + 2 * width + 2


def translator(width):
    """33,712 pieces of words; 6 blocks of 12 width^2 each way, in the decoder 4 more to read the source."""
    block = 12 * width**2 + 13 * width
    return 33_712 * width + 6 * (2 * block + 4 * width**2 + 6 * width) + 2 * 2 * width


PARAMETERS = {
    # published: 110 M and 340 M (Devlin et al. 2018, table 1), with 30,522 words and no head
    "bert_base_squad": encoder(768, 12) + 2 * 768 + 2,
    "bert_large_squad": encoder(1024, 24) + 2 * 1024 + 2,
    "bert_base_phase1": masked_words(768, 12),
    "bert_base_phase2": masked_words(768, 12),
    "bert_large_phase1": masked_words(1024, 24),
    "bert_large_phase2": masked_words(1024, 24),
    "transformer_xl_base": 191_950_298,  # logged by its training code, rounded to 192 M in the README
    # blocks; tables of 1,024, 256, 64 and 16; projections of each and one of the head; clusters, biases
    "transformer_xl_large": 18 * (13 * 1024**2 + 4096 + 5 * 1024)
    + 19_997 * 1024
    + 20_000 * 256
    + 160_000 * 64
    + 67_738 * 16
    + 1024 * (1024 + 256 + 64 + 16)
    + 1024**2
    + 3 * 1025
    + 267_735
    + 2 * 1024,
    # published: 65 M and 213 M with 37,000 pieces of words (Vaswani et al. 2017, table 3)
    "transformer_base": translator(512),
    "transformer_big": translator(1024),
    "gnmt": 160_671_297,  # logged by its training code
    "ncf": (138_493 + 26_744) * (64 + 128) + 256 * 257 + 256 * 128 + 128 + 128 * 64 + 64 + 129,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name):
    module, _ = network(name)
    assert sum(parameter.numel() for parameter in module.parameters()) == PARAMETERS[name]


def traced(name, **changed):
    module, inputs = network(name, **changed)
    return trace_module(module, inputs, precision="fp16", autocast=is_mixed(name))


def test_bert_computes_what_its_layers_multiply():
    """Products of 12 layers and two of attention, three times; those of two classes; no table multiplies."""
    words, width = 64, 768
    layers = 12 * (12 * width**2 + 2 * words * width)
    assert traced("bert_base_squad", words=words).flops(2) == 2 * 6 * words * (layers + 2 * width)
    heads = 8 * (width**2 + 30_528 * width) / words + (width**2 + 2 * width) / words
    made = traced("bert_base_phase1", words=words, masked=8).flops(2)
    assert made == pytest.approx(2 * 6 * words * (layers + heads), rel=1e-12)


def test_gnmt_computes_what_its_layers_multiply():
    """Gates of 8 or 12 width^2 (one layer reads both ways), two products of attention, and the head."""
    words, width = 12, 1024
    encoder = (2 * 8 + 12 + 8 + 8) * width**2
    decoder = (8 + 3 * 12) * width**2 + 2 * width**2 + words * width + 32_320 * width
    scores = words * width  # a product of a weight and each pair of words
    made = traced("gnmt", words=words).flops(2)
    # the state before the first step is given: no gradient of its product
    first = 9 * 4 * width**2
    assert made == pytest.approx(2 * (6 * words * (encoder + decoder + scores) - 2 * first), rel=0.002)


def test_transformer_xl_computes_what_its_layers_multiply():
    """Keys and values of two segments, scores by content and by distance, and clusters by their shares."""
    words, width, blocks = 96, 512, 16
    block = 2 * 3 * width**2 + width**2 + 8 * width**2 + 3 * 2 * words * width
    rarer = [max(1, round(words * share)) for share in SHARES[1:]]
    sizes = [b - a for a, b in zip(CUTOFFS, (*CUTOFFS[1:], VOCAB), strict=True)]
    tails = sum(count * size for count, size in zip(rarer, sizes, strict=True)) * width / words
    head = (CUTOFFS[0] + 3) * width
    of_distances = blocks * 2 * 2 * words * width**2 * 2  # of all samples: forward and the weight's gradient
    made = traced("transformer_xl_base", words=words).flops(2)
    forward = 2 * 2 * words * (blocks * block + head + tails)
    assert made == pytest.approx(3 * forward + of_distances, rel=0.03)  # memory has no gradient of its own


def test_ncf_computes_what_its_mlp_multiplies():
    assert traced("ncf").flops(2) == 2 * 6 * (256 * 256 + 256 * 128 + 128 * 64 + 128)


def test_words_of_clusters_follow_the_counts_of_the_corpus():
    """A power of the rank by which the rarest of 267,735 words comes three times in 103,227,021."""
    power = 1.275
    ranks = [rank**-power for rank in range(1, VOCAB + 1)]
    assert 3 * VOCAB**power * math.fsum(ranks) == pytest.approx(103_227_021, rel=0.01)
    ends = (0, *CUTOFFS, VOCAB)
    shares = [math.fsum(ranks[a:b]) / math.fsum(ranks) for a, b in pairwise(ends)]
    assert shares == pytest.approx(SHARES, abs=2e-4)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("bert-large-squad", "bert_large_squad"),
        ("BERT_base_SQuAD", "bert_base_squad"),
        ("gnmt", "gnmt"),
        ("GNMT-v2", "gnmt"),
        ("ncf", "ncf"),
        ("NeuMF", "ncf"),
        ("transformer-xl-base", "transformer_xl_base"),
        ("transformerxllarge", "transformer_xl_large"),
        ("transformer-big", "transformer_big"),
        ("bert-large", None),  # a model of the catalog, by the formulas of language models
    ],
)
def test_networks_of_words_are_known_by_what_users_type(typed, name):
    assert network_name(typed) == name
