"""Our engines inside vLLM's workers: `plugin.register` is found by vLLM through `vllm.general_plugins`.

plugin    makes the engines known to vLLM, and the trainers
engine    what a worker calls: nothing raises, and nothing but the commit keeps it from serving
 ├─ model       the target: versions go through vLLM's reload, all or none
 │   ├─ draft       the draft model beside it, and what of a version is its
 │   └─ reload      one model through that reload
 ├─ checkpoint  what the loader takes, known before anything is touched
 │   └─ rehearsal   the same, and which parts, from loading without memory
 └─ adapters    LoRA adapters by label, which vLLM's own manager loads when a request names one

trainer   what vLLM's factory of trainers makes
 ├─ source      vLLM's sources of weights as ours
 └─ ray_client  Ray actors in the place of vLLM's client for them
"""
