"""Our versions in SGLang servers (0.5.23), through `--custom-weight-loader`. Only `loader` imports anything of SGLang.

client    what a trainer drives such servers with
loader    what every tensor-parallel worker calls: nothing raises, and nothing but the commit keeps it from serving
 └─ model     the target: versions go through the model's own loader, all or none
payload   a call as a tensor, and around it what SGLang's route takes
"""
