"""Imported last by the fork server: workers then share the memory of all that it has loaded.

A garbage collection writes to every object that it visits, so each worker would get its own copy. There is none
before the freeze either: it would free almost nothing and delay the workers. When the driver is gone, the fork
server exits without unloading all modules, which would take a second.
"""

import atexit
import gc
import os

gc.freeze()
gc.enable()
atexit.register(os._exit, 0)  # workers never get here: they exit at the end of their own code
