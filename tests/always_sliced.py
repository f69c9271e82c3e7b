"""A script that runs another one with forwards sliced even where that does not pay: ``always_sliced.py SCRIPT``.

Networks of tests are too small to be sliced otherwise.
"""

import runpy
import sys

from lagom.forward.rows import whole_batch

whole_batch.ALWAYS = True
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
