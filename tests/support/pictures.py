"""Pictures as their pixels."""

import io

import numpy as np
from PIL import Image, ImageColor


def pixels(png):
    """[height, width, 3]."""
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def has_colour(image, name):
    return bool((image == ImageColor.getrgb(name)).all(2).any())


def whole(image):
    """Whether nothing is cut off at an edge."""
    edges = (image[:2], image[-2:], image[:, :2], image[:, -2:])
    return all(bool((edge == 255).all()) for edge in edges)
