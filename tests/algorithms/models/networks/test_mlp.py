import torch

from staddle.algorithms.models.build import ModelOptions, build, input_shape


def test_the_perceptron_of_two_layers():
    """The perceptron of two layers has the authors parameters and a rectified hidden layer."""
    options = ModelOptions(name="ppfl-mlp", classes=10)
    assert input_shape(options) == (1, 28, 28)
    extractor, classifier = build(options, 3).values()
    assert sum(p.numel() for p in extractor.parameters()) == 784 * 128 + 128 == 100_480
    assert sum(p.numel() for p in classifier.parameters()) == 128 * 10 + 10 == 1_290
    with torch.no_grad():
        extractor.fc.weight.zero_()
        extractor.fc.bias.copy_(torch.arange(128.0) - 64)
    features = extractor(torch.randn(2, 1, 28, 28))
    assert features.shape == (2, 128)
    assert features[0, :65].eq(0).all()
    assert features[1, 65:].tolist() == [float(n) for n in range(1, 64)]
