"""The demos there are, by what they are about."""

from pirl.demo.acrlpd_plan import ACRLPD, ACRLPD_STATE
from pirl.demo.ript_plan import RIPT

PLANS = {"acrlpd": ACRLPD, "acrlpd_state": ACRLPD_STATE, "ript": RIPT}
