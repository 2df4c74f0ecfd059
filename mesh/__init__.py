"""What every service is built from; imports no tensor library and no service."""

import gc
import os

# Number of unfreed containers after which Python collects its youngest generation. Its default of 700 makes collections
# take a sixth of the import of torch, a tenth of a service's start, and a fifteenth of a busy gateway's time.
COLLECT_AFTER_OBJECTS = 20_000
gc.set_threshold(COLLECT_AFTER_OBJECTS, *gc.get_threshold()[1:])
# Pydantic would look for plugins in the metadata of every installed package, for a tenth of a service's start.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
