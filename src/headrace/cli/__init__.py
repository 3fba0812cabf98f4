"""The `headrace` command: one file for each thing that it does; `main` puts them together.

main               the commands, and what holds for all of them; `headrace keys`
commands           what all commands share: options, help, failures
serve              `headrace dispatcher`, `headrace worker`
task               `headrace server`: a worker or a parameter server of a cluster
up                 `headrace up`: the ranks of a Slurm step; `chief_rank` is rank 0, with the
                   dispatcher and the user's program, `server_rank` any other; `step_options` has
                   the options and the processes of a rank
run_server         one server, or several worker processes, from the start to the last line
inspect            `headrace status`, `headrace journal`; a status as text and as JSON
top                `headrace top`: a live view
dashboard          `headrace dashboard`, `headrace report`: the same as a web page
status_client      asks whatever listens at an address for its status
dispatcher_frame   one frame of a dispatcher, as text, with what bounds an epoch
coordinator_frame  one frame of a coordinator or a parameter server
formatting         numbers, lines and columns of a frame
doctor             `headrace doctor`: what of this machine would hurt
job_report         `headrace doctor --job`: the bottleneck of a job, and what changes would bring
job_measurement    rates of an epoch of a job, from two statuses
demo               `headrace demo`: the classifier and its training; `digits_data` has the data,
                   which workers import without JAX
"""
