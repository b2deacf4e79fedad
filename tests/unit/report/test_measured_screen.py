"""A profile as people read it."""

from foreshard.report.measured_screen import profile_screen
from foreshard.report.plain import render


def test_a_profile_names_its_largest_size_and_every_layer():
    timed = {"forward": [[[0.1, 0.25]]], "backward": [[[0.1, 0.5]]], "saved_bytes": [2048]}
    profile = {
        "fingerprint": {"job": "job.py", "accelerator": "", "processor": "a CPU", "threads": 1},
        "passes": {"1": timed, "8": timed},
        "bytes": [{"parameter_bytes": 4096}],
        "optimizer": [{"seconds": [[0.1, 0.125]]}],
    }
    text = render(profile_screen(profile, "profile.json"))
    assert "job.py on a CPU, 1 thread\n" in text and "layers, 8 samples, wall time" in text
    assert "0   250 ms    500 ms     125 ms     4.0 KiB        0.2 KiB" in text
    del profile["passes"]["8"]
    assert "layers, 1 sample, wall time" in render(profile_screen(profile, "profile.json"))
