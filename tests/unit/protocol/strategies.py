"""What the property tests of the rules draw from: JSON as clients write it."""

import json

from hypothesis import strategies as st

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)

VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)

WHITESPACE = st.text(" \t\r\n", max_size=3)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """A JSON body, compact or spread out, escaped or not, with white space around it."""
    text = json.dumps(
        draw(VALUES),
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, 1])),
    )
    # A lone surrogate can be written as an escape, but not as UTF-8.
    encoded = text.encode("utf-8", "replace")
    return draw(WHITESPACE).encode() + encoded + draw(WHITESPACE).encode()
