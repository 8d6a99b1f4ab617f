"""Before any test module: gRPC reads its variables when it is imported. Test modules import what they share by name."""

import sys
from pathlib import Path

from staddle.proto.channel import require_tls13

require_tls13()
sys.path.insert(0, str(Path(__file__).parent))
