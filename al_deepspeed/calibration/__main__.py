"""The scan as a `deepspeed` launch; `al-deepspeed calibrate` starts it, or the launcher directly:

    deepspeed --module al_deepspeed.calibration --deepspeed_config ds.json --factory pkg.mod:function \
        --manifest corpus/manifest.parquet --out calibration.json -- --pretrained NAME
"""

import sys

from al_deepspeed.calibration.launched import main

sys.exit(main())
