"""Decision how a job's command is launched: once for each worker, or once for each pod."""
