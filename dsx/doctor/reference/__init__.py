"""What every key of DeepSpeed 0.19.8's JSON is: types, defaults, bounds, effect, history.

Data in TOML files, for people to edit, read without torch or pydantic; tests/doctor/test_reference.py holds
it against the installed DeepSpeed: its pydantic models, constants and signatures. Versions were read out of
DeepSpeed's releases 0.8.3 to 0.19.8.
"""

from dsx.doctor.reference.explain import explain, explain_json
from dsx.doctor.reference.table import BLOCKS, KEYS

__all__ = ["BLOCKS", "KEYS", "explain", "explain_json"]
