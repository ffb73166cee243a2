import sys

from torch_replay_command import main

sys.exit(main())
