"""The vocabulary of generated modules. Changing it changes the demo policy's tokenizer: rebuild the policy then."""

from __future__ import annotations

_NOUNS = """
price cost width height depth weight speed time rate count size length age score rank level budget salary tax
fee profit loss margin volume area mass force power heat light sound load stock supply demand balance credit
debit payment refund deposit interest income expense bonus total limit target quota share ratio offset delay gap
step stride pitch angle radius range span slope base top bottom left right front back start end first last low
high near far old new past future morning evening winter summer north south east west river lake hill stone wood
iron gold silver copper paper glass water sugar salt bread milk apple pear plum grape lemon berry tomato onion
carrot bean corn wheat rice oats barley cattle sheep horse
"""

_FLAGS = """
open closed full empty active idle ready busy valid broken locked sealed clean dirty warm cold dry wet loud
quiet bright dark fast slow free paid public private local remote fresh stale known hidden
"""

_VERBS = """
get make find work figure settle derive give draft plan rate weigh judge track gauge chart
"""

_MODULES = """
shop bank farm mill port mine dock yard shed barn depot plant store lab desk vault kiosk garage studio
"""

NOUNS = tuple(_NOUNS.split())
FLAGS = tuple(_FLAGS.split())
VERBS = tuple(_VERBS.split())
MODULES = tuple(_MODULES.split())
