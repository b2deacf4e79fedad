"""Intervals on devices of an architecture that nobody has measured."""

from foreshard.predict.interval import class_interval, points_of, residual_classes


def test_points_of_unmeasured_architectures_are_those_of_the_class_one_wider():
    points = {"dense:flash:wide:fitted": [[1.0]], "dense:flash:narrow:fitted": [[2.0]]}
    assert points_of("dense:flash:wide:datasheet", points) == [[1.0]]
    assert points_of("moe:flash:wide:datasheet", points) == []


def test_a_known_architecture_is_not_less_certain_than_an_unknown_one():
    table = residual_classes()
    for name, entry in table.items():
        if name.endswith(":datasheet") and (known := table.get(f"{name.rpartition(':')[0]}:fitted")):
            inside = known["points"][0]
            low, high = class_interval([name], inside, 1.0, table)
            assert low < 1.0 < high
            assert entry["bounds"][1] >= known["bounds"][1]
    assert table["dense:flash:wide:datasheet"]["bounds"][1] > table["dense:flash:wide:fitted"]["bounds"][1]
