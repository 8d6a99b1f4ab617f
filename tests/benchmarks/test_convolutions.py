from argparse import Namespace

OPTIONS = Namespace(device="cpu", precision="float32", silos=2, repeats=1)


def test_the_forms_of_each_convolution_are_timed(program):
    found = program.shapes("lenet5")
    expected = [(6, (32, 3, 32, 32)), (16, (32, 6, 14, 14))]
    assert [(leaf.out_channels, tuple(shape)) for leaf, shape in found] == expected
    leaf, shape = found[1]
    times = program.measured(leaf, shape, OPTIONS)
    assert list(times) == ["grouped", "unfolded", "looped"]
    assert all(seconds > 0 for both in times.values() for seconds in both)


def test_images_of_one_channel_are_measured_too(program):
    first, _ = program.shapes(*program.MEASURED[0])
    assert (first[0].in_channels, tuple(first[1])) == (1, (32, 1, 32, 32))
