"""The `headrace` command: one file for each thing that it does; `main` puts them together.

main               the commands, and what holds for all of them
serve              `headrace dispatcher`, `headrace worker`
running            one server, from its start to the last word
supervise          several worker processes of one command
signals            waiting for Ctrl-C, SIGTERM and children
inspect            `headrace status`
keys               `headrace keys`
doctor             `headrace doctor`: what of this machine would hurt
demo               `headrace demo`, with digits_data and digits_classifier
help               plain text, in which names are whole
failures           how a failure looks: one line and an exit code
"""
