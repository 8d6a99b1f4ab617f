"""Data sets as ``save_to_disk`` of Hugging Face's library writes them, without the library."""

import io
import json

import numpy as np
import pyarrow as pa
from PIL import Image

IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def save(folder, columns, features=None, shards=1, state=None):
    """Write columns as a data set in so many Arrow files; ``features`` as in dataset_info.json."""
    folder.mkdir(parents=True)
    table, names = pa.table(columns), []
    for shard in range(shards):
        names.append(f"data-{shard:05}-of-{shards:05}.arrow")
        first, end = (len(table) * each // shards for each in (shard, shard + 1))
        with pa.ipc.new_stream(folder / names[-1], table.schema) as stream:
            stream.write_table(table.slice(first, end - first), max_chunksize=3)
    files = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0f"}
    (folder / "state.json").write_text(json.dumps(files | (state or {})))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features or {}}))
    return folder


def label(*names):
    """A ClassLabel in dataset_info.json."""
    return {"_type": "ClassLabel", "names": list(names)}


def png(value, height=2, width=3):
    """The bytes of a grey PNG."""
    file = io.BytesIO()
    Image.fromarray(np.full((height, width), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


def images(entries):
    """A column of images: bytes, or texts that are paths."""
    rows = [
        {
            "bytes": None if isinstance(each, str) else each,
            "path": each if isinstance(each, str) else None,
        }
        for each in entries
    ]
    return pa.array(rows, IMAGE)
