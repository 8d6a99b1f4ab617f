"""A message's frames as a coordinator streams them."""

from staddle.proto import tensor_pb2 as tensor
from staddle.proto.stream import Digester, recut
from staddle.proto.wire import to_wire


def framed(job, round_, pieces, /, items=(), chunk=1 << 20, **manifest):
    """Manifest, chunks and end of a delivery of these pieces of bytes, whose digests are correct.

    ``items`` name the tensors among them; ``manifest`` replaces or adds fields.
    """
    digester = Digester([len(piece) for piece in pieces])
    for piece in pieces:
        digester.update(memoryview(piece))
    digests = digester.digests()
    head = {"job": job.name, "job_digest": bytes.fromhex(job.digest), "round": round_}
    head |= {"size": sum(map(len, pieces)), "tensors": to_wire(items), **manifest}
    return [
        tensor.Frame(manifest=tensor.Manifest(**head)),
        *(tensor.Frame(chunk=bytes(each.content)) for each in recut(pieces, chunk)),
        tensor.Frame(end=tensor.End(sha256=digests.total, tensor_sha256=digests.tensors)),
    ]
