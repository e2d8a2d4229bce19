"""Claim: rollouts through the agent loop reach 0.95 or more of the tokens/s of a bare AsyncLLM.generate.

    python benchmarks/rollout.py [--models smollm2 tiny] [--concurrent 1 16 64 256] [--repeats 2] [--replicas 1]

The agent loop is that of a run: episodes through RolloutManager, runner actor, flow, environment with threads of its
own, chat template, fleet client and socket, to a replica. The bare side is one coroutine per episode inside the same
replica's actor that calls the same AsyncLLM, with nothing between an episode's steps: it keeps the order of an
episode's steps, generates exactly as many tokens as the agent loop got for each prompt, and its prompts are as long
and as often cached (each step's prompt is the previous one, the tokens it sampled itself, and the recorded ids that
followed). Sampling parameters are the same, log-probs included. The two alternate, each with an empty prefix cache,
each bare run repeating the requests of the agent loop before it; the fastest of each counts, because other work on
the machine only adds time.

    smollm2   SmolLM2-135M with 1 and 32 episodes of 3 steps of up to 48 tokens
    tiny      a model of 120,000 parameters, with 1, 16, 64 and 256 episodes of 3 steps of up to 48 tokens; then 256
              again with an environment that takes 0.2 s for each step, against the same requests without any wait

    no engine 16 and 256 episodes of 8 steps, with a replica that answers after 0.1 s without a model: all that a step
              costs outside the engine

The claim is about SmolLM2 with 32 episodes, and so is the value. The tiny model has next to no model in it: it shows
what a step costs outside the engine. `CPU ms` is the processor time of all processes around the engine's own (driver,
runner, replica actor) for one step, and in parentheses what of it the bare side needs too; other work on the machine
does not count in it. `cached` is prefix_cache_hit_frac over prefix_cache_ideal_frac. Prints a table, and one JSON
object as the last line. Takes 4 to 5 minutes on 2 idle cores.
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[1] / "rollout")]
# The scripts of this folder, and the Ray workers that they start, find this file where they mean the package `rollout`.
# With the package's path it stands in for it: `import rollout.fleet` gives the package's module.

if __name__ == "__main__":
    from agent_loop import main

    main(__doc__)
