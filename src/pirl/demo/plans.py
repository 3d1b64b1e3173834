"""The demos there are, by what they are about."""

from pirl.demo.acrlpd_plan import ACRLPD
from pirl.demo.ript_plan import RIPT

PLANS = {"acrlpd": ACRLPD, "ript": RIPT}
