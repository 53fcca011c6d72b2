"""`python -m quantlab_cli`."""

import sys

from quantlab_cli.main import main

sys.exit(main())
