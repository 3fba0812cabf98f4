"""The `headrace` command: one file for each thing that it does; `main` puts them together.

main               the commands, and what holds for all of them
serve              `headrace dispatcher`, `headrace worker`
task               `headrace server`: a worker or a parameter server of a cluster
running            one server, from its start to the last word
supervise          several worker processes of one command
signals            waiting for Ctrl-C, SIGTERM and children
options            what several commands take alike
inspect            `headrace status`
top                `headrace top`: a live view
asking             a look at whatever listens at an address
shown              what a look found, as text and as JSON
frame              one frame of a dispatcher, as text
coordinator_frame  one frame of a coordinator or a parameter server
tables             lines and columns of a frame
advice             what bounds a pass, and what would help
quantities         numbers, bytes and times as people read them
plot               a row of numbers as a row of letters
journal            `headrace journal`: what became of a task or a job
keys               `headrace keys`
doctor             `headrace doctor`: what of this machine would hurt
demo               `headrace demo`, with digits_data and digits_classifier
help               plain text, in which names are whole
failures           how a failure looks: one line and an exit code
"""
