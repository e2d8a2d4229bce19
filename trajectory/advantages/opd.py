"""On-policy distillation (Agarwal et al. 2024, GKD; Gu et al. 2024, MiniLLM): the teacher judges what was sampled.

    A_i = log p_teacher(i) - log p_old(i)  +  task_weight * grpo

The difference is minus the k1 estimate of the reverse KL(policy || teacher) at token i, the reward of that token
alone (discount 0): no other reward, group or critic is needed where task_weight is 0.
"""

from trajectory.advantages.grpo import grpo
from trajectory.advantages.inputs import Credit, EstimatorInputs
from trajectory.advantages.needed import needed

TEACHER = "set algorithm.teacher, the model to distil from"


def opd(inputs: EstimatorInputs, *, task_weight: float = 0.0, std: bool = True, eps: float = 1e-6) -> Credit:
    """An advantage for every trained token; `std` and `eps` are those of the task's part.

    Raises ValueError without the teacher's or the policy's own log-probs.
    """
    teacher = needed(inputs.teacher_logprobs, "teacher_logprobs", TEACHER)
    advantages = teacher - needed(inputs.old_logprobs, "old_logprobs", TEACHER)
    if task_weight:
        advantages = advantages + task_weight * inputs.on_tokens(grpo(inputs, std=std, eps=eps))
    return Credit(advantages=advantages)
