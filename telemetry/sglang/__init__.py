"""Recording a running SGLang. Owns: what the plugin `telemetry.sglang_plugin` is made of.

`seams` says where it holds on to SGLang and refuses a version that differs there. `hooks` takes facts on the
scheduler's thread, `worker` carries them to another one, where `mapping` and `reasons` make this engine's records of
them. `support` says what is recorded, what is absent and which laws can be judged; `judging` lays a journal before
those. Nothing here changes what SGLang decides.
"""
