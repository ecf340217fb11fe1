"""Why the trainer cannot go back, or not now.

Problem
├── StepNotCommitted (409)
├── LineageConflict (409)
├── NotDurable (409)
└── StepsMoving (503, with Retry-After)
"""

from services.kit.problems import Problem


class StepNotCommitted(Problem):
    """Going back to a step that not every rank has committed, or that the run does not have."""

    status, code, title = 409, "step_not_committed", "Step not committed"


class LineageConflict(Problem):
    """Going back for another time than the next."""

    status, code, title = 409, "lineage_conflict", "Lineage conflict"


class NotDurable(Problem):
    """The ledger in memory does not keep what this needs."""

    status, code, title = 409, "ledger_not_durable", "Ledger not durable"


class StepsMoving(Problem):
    """What was looked at changed too often meanwhile; ask again."""

    status, code, title = 503, "steps_moving", "Steps are moving"
