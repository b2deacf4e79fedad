import json
import re

import pytest

from foreshard.advise.advice import improvements
from foreshard.report.pages import prediction_page
from foreshard.spec.timeline import Event, Timeline

BUDGET_BYTES = 1_500_000


@pytest.fixture
def data(answered):
    asked, prediction, timeline = answered
    return prediction_page.page_data(asked, prediction, timeline, improvements(asked, prediction))


def embedded(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def test_nothing_is_loaded_from_anywhere(data):
    page = prediction_page.page(data)
    rest = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!data:)|@import|url\((?!#)|fetch\(|XMLHttp", rest)
    assert "default-src 'none'" in page


def test_embedded_data_survive_and_cannot_break_out(data, answered):
    page = prediction_page.page(data)
    found = embedded(page)
    assert found["prediction"]["assumptions"] == list(answered[1].assumptions)
    assert page.count("</script>") == 2, "one data block and one script, whatever the data say"


def test_template_slots_in_the_data_stay_text(data):
    page = prediction_page.page({**data, "title": "{{script}}"})
    assert embedded(page)["title"] == "{{script}}"


def test_parts_of_each_stage_sum_to_its_peak(data):
    assert len(data["stages"]) == 4
    for stage in data["stages"]:
        assert sum(stage["parts"].values()) == pytest.approx(stage["peak"])
        assert stage["peak"] < stage["capacity"]


def test_the_compact_timeline_gives_the_tasks_back(data, answered):
    _, _, timeline = answered
    drawn = data["timeline"]
    found = []
    for track in drawn["tracks"]:
        clock = 0
        for gap, length, name, _, micro_batch, _ in track["tasks"]:
            start = clock + gap
            clock = start + length
            found.append(
                (
                    track["rank"],
                    drawn["names"][name],
                    micro_batch,
                    start * drawn["tick"],
                    clock * drawn["tick"],
                )
            )
    wanted = [(e.rank, e.name, e.micro_batch, e.start_s, e.end_s) for e in timeline.events]
    assert len(found) == len(wanted)
    for one, other in zip(sorted(found), sorted(wanted), strict=True):
        assert one[:3] == other[:3]
        assert one[3:] == pytest.approx(other[3:], abs=2e-6 * timeline.step_time_s)


def test_a_very_long_step_keeps_its_ends_and_its_budget(answered):
    asked, prediction, _ = answered
    events = tuple(
        Event(
            rank=r,
            group=0,
            stage=r // 4,
            stream="compute",
            name="forward",
            part="compute",
            start_s=1e-5 * i,
            end_s=1e-5 * (i + 1),
            micro_batch=i,
            chunk=0,
        )
        for i in range(25_000)
        for r in (0, 4, 8, 12)
    )
    data = prediction_page.page_data(asked, prediction, Timeline(events=events, step_time_s=0.25))
    hidden = data["timeline"]["hidden"]
    assert hidden["count"] == 100_000 - prediction_page.MAX_DRAWN and 0 < hidden["from"] < hidden["to"] < 0.25
    assert len(prediction_page.page(data)) < BUDGET_BYTES


def test_equal_groups_are_drawn_once(answered, fake):
    from dataclasses import replace

    _, prediction, _ = answered
    group = prediction.plan.groups[0]
    other = replace(
        group, stages=tuple(replace(s, ranks=tuple(r + 16 for r in s.ranks)) for s in group.stages)
    )
    plan = replace(prediction.plan, groups=(group, other, replace(other, share=7)))
    assert [one["count"] for one in prediction_page._folded(plan)] == [2, 1]


def test_without_scripts_there_is_the_text(data):
    page = prediction_page.page(data)
    assert "Where the time goes" in re.search(r"<noscript>(.*?)</noscript>", page, re.S)[1]


@pytest.mark.parametrize(
    ("numbers", "text"), [((0, 1, 2, 3), "0-3"), ((5,), "5"), ((0, 1, 4, 8, 9), "0-1, 4, 8-9")]
)
def test_spans(numbers, text):
    assert prediction_page.spans(numbers) == text


def test_the_network_of_the_cluster_is_an_image_inside_the_page(data, answered):
    import base64

    head, _, code = data["network"]["image"].partition(",")
    assert head == "data:image/svg+xml;base64"
    picture = base64.b64decode(code).decode()
    assert picture.startswith("<svg") and f"{answered[0].cluster.num_devices} devices" in picture


def test_networks_that_are_not_drawn_say_why(answered):
    from foreshard.api import load_cluster

    assert prediction_page._network(load_cluster("1x1xrtx-3090")) is None
    large = prediction_page._network(load_cluster("513x8xh100-sxm"))
    assert large["image"] is None and "more than 4,096 devices" in large["why"]
