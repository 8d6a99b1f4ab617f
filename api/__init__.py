"""What programs and notebooks use: experiments as objects, federations, an operator's client."""

from ..proto.channel import require_tls13

# Before anything imports gRPC, which reads its variables then.
require_tls13()
