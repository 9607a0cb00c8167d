"""Take out of an npm lock file what names hosts and pins nothing: where to send donations."""

import json
import sys
from pathlib import Path

lock = Path(sys.argv[1])
content = json.loads(lock.read_text())
for package in content["packages"].values():
    package.pop("funding", None)
lock.write_text(json.dumps(content, indent=2) + "\n")
