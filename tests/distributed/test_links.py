"""Links timed for real between two processes."""

from foreshard.profile.calibration import fitted_links
from foreshard.profile.link_times import SIZES, local_links


def test_two_processes_time_their_link():
    made = local_links(2, "cpu", repeats=5)
    assert (made["ranks"], made["hosts"], made["backend"]) == (2, 1, "gloo")
    assert [row["bytes"] for row in made["messages"]] == list(SIZES) == [row["bytes"] for row in made["sums"]]
    assert all(second > 0 for kind in ("messages", "sums") for row in made[kind] for second in row["seconds"])
    assert 0 < made["launch_s"] < 1e-2
    within = fitted_links(made)["within"]
    assert within["bytes_per_s"] > 1e6 and within["ring_bytes_per_s"] > 1e6
