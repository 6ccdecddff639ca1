"""Layer of megatron/core/optimizer/distrib_optimizer.py.

Same as upstream but for faults of resuming, the first two with torch's own Adam (no Transformer Engine, no
Apex):
- DistributedOptimizer.state_dict: works before the first step, when loading asks it for a template. Stock
  looks for the one step count that all parameters share, and asserts where there is none yet.
- DistributedOptimizer.load_state_dict: gives each parameter the saved step count, in a tensor of its own.
  Stock gives all of them one tensor, which Adam would count up once per parameter, and then overwrites
  it with the template's 0 when it loads the parameters' state.
- DistributedOptimizer.load_state_dict: records no gradients. In fp32 the optimizer's parameters are views of
  the model's, which stock cannot write into then.
"""

import torch

from megatron.overlay import upstream_of

upstream = upstream_of(__name__)


class DistributedOptimizer(upstream.DistributedOptimizer):
    """As upstream's; resumes with torch's Adam too."""

    def state_dict(self):
        """As upstream's; a step count of 0 before the first step."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if HAVE_APEX_OR_TE or self.optimizer.state or not parameters:  # noqa: F821
            return super().state_dict()
        self.optimizer.state[parameters[0]] = {"step": torch.tensor(0.0)}
        try:
            return super().state_dict()
        finally:
            self.optimizer.state.clear()

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """As upstream's."""
        super().load_state_dict(state_dict)
        if not HAVE_APEX_OR_TE:  # noqa: F821
            step = state_dict["optimizer"]["param_groups"][0]["step"]  # the groups share it
            for state in self.optimizer.state.values():
                state["step"] = torch.tensor(step, dtype=torch.float32)
