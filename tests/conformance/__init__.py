"""One list of cases, run on torch's DataLoader and on ours, the results held equal.

``python -m tests.conformance`` prints the list as a table, with what differs on purpose.
"""

import pytest

pytest.register_assert_rewrite("tests.conformance.comparison")
