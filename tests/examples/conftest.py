"""Makes the modules of the BERT example importable the way its script imports them."""

from __future__ import annotations

import pathlib
import sys

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "bert_pretrain"
if str(EXAMPLE) not in sys.path:
    sys.path.insert(0, str(EXAMPLE))
