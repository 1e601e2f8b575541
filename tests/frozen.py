"""Makes garbage collections cheap in nodes: the process that forks them imports this
after all that it loads.
"""

import gc

gc.collect()
gc.freeze()
