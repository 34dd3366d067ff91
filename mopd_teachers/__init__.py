"""Teacher servers and their clients: start, probe, score, stop. Never imports `mopd`.

    ServerSpec -> ServerProcess   starts and supervises one vLLM server (`server`, `serve`)
    TeacherClient                 speaks to one teacher's server(s), keyed by sample id (`client`)
    TeacherRouter                 sends each sample to its own domain's teacher (`router`)
    tokenizer_fingerprint         compares tokenizers by content (`tokenizer_check`)

All logprobs are natural logs (nats); sequences travel as token ids, never as text.
"""
