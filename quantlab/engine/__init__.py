"""Drive a model over token streams under many state policies at once."""

from quantlab.engine.planner import Plan, plan
from quantlab.engine.teacher_forcing import ENGINES, REFERENCE, Measurement, TeacherForcing

__all__ = ["ENGINES", "REFERENCE", "Measurement", "Plan", "TeacherForcing", "plan"]
