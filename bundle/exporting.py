"""A trained model in the forms that other programs read.

::

    safetensors    the values by name, and nothing that computes
    torch-export   a program of torch.export, for torch.export.load
    onnx           for ONNX Runtime and others
    torchscript    a traced module, for torch.jit.load

Each but the first takes records as they were measured (raw_records.py) and gives answers. Each is
read again and compared with the model before it gets its name, and holds as text what its numbers
are: the key or file ``staddle.json``.
"""

import json
import secrets
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import safetensors.torch
import torch
from torch import Tensor, nn

from ..errors import LocalError, UnwritableError
from ..files import tensor_file
from ..files.documents import unwritable
from ..files.packages import others_code
from .raw_records import raw_form
from .trained import TrainedModel

Format: TypeAlias = Literal["safetensors", "torch-export", "onnx", "torchscript"]
TEXT = "staddle.json"
ENDINGS: dict[Format, str] = {
    "safetensors": ".safetensors",
    "torch-export": ".pt2",
    "onnx": ".onnx",
    "torchscript": ".pt",
}
# Of answers: other programs multiply in another order.
RELATIVE, ABSOLUTE = 1e-3, 1e-5
Answering: TypeAlias = Callable[[Tensor], Tensor]


class ExportedModel(nn.Module):
    """Raw records [B, …] → answers [B, answers, …]."""

    def __init__(self, model: TrainedModel, preprocessing: nn.Module) -> None:
        super().__init__()
        self.preprocessing, self.model = preprocessing, model.module
        self.eval().requires_grad_(False)

    def forward(self, records: Tensor) -> Tensor:
        """The answers for records as they were measured."""
        answers: Tensor = self.model(self.preprocessing(records))
        return answers


def export(model: TrainedModel, path: Path, form: Format) -> float:
    """Write a model in another form; returns the largest difference of an answer.

    LocalError where the model has no such form, or the form computes something else. An existing
    file is replaced.
    """
    raw = raw_form(model.contract, model.job)
    text = json.dumps(_told(model, raw.inputs))
    # torch looks at the ending.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp{ENDINGS[form]}")
    try:
        if form == "safetensors":
            difference = _values(model, temporary, text)
        else:
            whole = ExportedModel(model, raw.module)
            written = {"torch-export": _program, "onnx": _onnx, "torchscript": _script}[form]
            what = f"{path}: the model cannot be exported as {form}"
            with others_code(what, "choose another --format"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of what it will replace
                with torch.no_grad():
                    again = written(whole, raw.raw, temporary, text)
                    # One record, too: a form may keep the number of those that it was made with.
                    found = again(raw.raw), again(raw.raw[:1])
            wanted = model.module.answers(raw.ready), model.module.answers(raw.ready[:1])
            difference = max(map(partial(_compared, path, form), found, wanted))
        temporary.replace(path)
    except OSError as error:
        raise UnwritableError(f"{path}: cannot write it: {unwritable(error)}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return difference


def _told(model: TrainedModel, inputs: tuple[dict[str, Any], ...]) -> dict[str, object]:
    """What a program needs to know of the numbers."""
    own = model.description
    return {
        "inputs": inputs,
        "answers": model.answer_names,
        "thresholds": {each.of: each.value for each in own.thresholds},
        "job": own.job["name"],
        "job_digest": own.job_digest,
        "task": model.job.task.kind,
        "made_by": own.origin.name,
    }


def _compared(path: Path, form: Format, found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape or not torch.allclose(
        found, wanted, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True
    ):
        raise LocalError(
            f"{path}: read again, the file gives other answers than the model; choose another"
            f" --format than {form}, and report it"
        )
    return float((found - wanted).abs().nan_to_num().max())


def _values(model: TrainedModel, path: Path, text: str) -> float:
    values = {
        f"{part}.{name}": tensor.contiguous()
        for part, module in model.module.parts.items()
        for name, tensor in module.state_dict().items()
    }
    path.write_bytes(tensor_file.to_bytes(values, {TEXT: text}))
    again = safetensors.torch.load_file(path)
    same = again.keys() == values.keys() and all(
        torch.equal(own, values[name]) for name, own in again.items()
    )
    if not same:
        raise LocalError(f"{path}: read again, it has other values; free some disk, and try again")
    return 0.0


def _program(whole: nn.Module, raw: Tensor, path: Path, text: str) -> Answering:
    records = torch.export.Dim("records")
    program = torch.export.export(whole, (raw,), dynamic_shapes=({0: records},))
    torch.export.save(program, path, extra_files={TEXT: text})
    again: Answering = torch.export.load(path).module()
    return again


def _script(whole: nn.Module, raw: Tensor, path: Path, text: str) -> Answering:
    torch.jit.save(torch.jit.trace(whole, raw), str(path), _extra_files={TEXT: text})  # type: ignore[no-untyped-call]
    again: Answering = torch.jit.load(str(path))  # type: ignore[no-untyped-call]
    return again


def _onnx(whole: nn.Module, raw: Tensor, path: Path, text: str) -> Answering:
    try:
        import onnx  # noqa: PLC0415 - installed for those who export
        import onnxruntime  # noqa: PLC0415
        import onnxscript  # noqa: F401, PLC0415
    except ModuleNotFoundError as error:
        raise LocalError(
            f"{path}: ONNX files are written and tried by {error.name}; pip install 'staddle[onnx]'"
        ) from error
    found = torch.onnx.export(
        whole,
        (raw,),
        dynamo=True,
        verbose=False,
        input_names=["records"],
        output_names=["answers"],
        dynamic_shapes=({0: torch.export.Dim("records")},),
    )
    if found is None:
        raise LocalError(f"{path}: torch exported nothing; choose another --format")
    model = found.model_proto
    onnx.helper.set_model_props(model, {TEXT: text})
    onnx.save(model, path)
    session = onnxruntime.InferenceSession(str(path))

    def answers(records: Tensor) -> Tensor:
        (own,) = session.run(None, {"records": records.numpy()})
        return torch.from_numpy(own)

    return answers
