"""Rewards: what a response is worth, found by functions that run in worker processes which can be killed.

controller                                            worker process, no torch
----------                                            ------------------------
pool        submit a sample, gather its score         worker      the process: load, serve
dispatcher  the thread that hands out jobs,           isolation   memory limit, dies with the controller
            keeps time, replaces workers              function    load the user's functions, call them
process     one worker: start, talk, kill             signature   how a function is called
board       where scores hang until gathered          outcome     what it returned, as a number
                                                      raised      what it raised
both: sample (what is scored, what comes back), messages (between the two)
built in: numbers, maths, format; listed in built_in
"""
