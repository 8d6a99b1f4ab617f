"""Before any test module: gRPC reads its variables when it is imported."""

from staddle.proto.channel import require_tls13

require_tls13()
