"""What compiling asks of a kind of device, beside what measuring on it does (`tune.site`).

protocol  the questions
policy    numbers of a search that depend on the kind of device
table     the kinds there are: a new one is a folder here and a line there
cpu, cuda the answers
"""
