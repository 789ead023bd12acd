"""Decision how a job's command is launched: once for each worker, or once for each pod.

`manifests.trainer_command` asks these modules in this order; the first answer decides:

1. `misplaced`: is there a word that only a shell would understand? The job is refused.
2. `detection.find`: which launcher does the command start? It goes through wrappers, shells and
   shell lines (`elasticjob_launcher.command_line` reads them), judges the words of each program
   (`programs`), and the arguments of unknown programs (`arguments`), with the values of variables
   as far as they are known (`variables`). `findings.deciding` selects the finding that counts.
3. `several_nodes`: can several nodes run the command? The job is refused if not.
4. `manifests.launcher_removal`: a torchrun at the beginning is removed; the job starts the workers.
5. A finding, unless it stands in the preparation alone: the command runs once for each pod.
6. `preparation.split`: a shell line becomes a preparation, once for each pod, and the command of
   each worker. A line that cannot be split runs whole on nodes with one worker.
7. Any other command runs once for each worker. The launcher in the pod reads the files of its
   program first, which the operator cannot see, and may decide otherwise.

docs/pod.md has the table of commands and reasons.
"""
