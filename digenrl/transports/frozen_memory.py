"""Imported last by the fork server: workers then share the memory of all that it has loaded.

A garbage collection writes to every object that it visits, so each worker would get its own copy.
"""

import gc

gc.collect()
gc.freeze()
