#!/bin/sh
# Runs a command, and runs it again for as long as another start can help:
#
#     docs/examples/supervise.sh syncer serve --resume auto --checkpoint-path run.ckpt ...
#
# In a few lines what systemd, a StatefulSet or srun --requeue do. It ends with the status of the
# command: 0, its run is over; 2 and 4, somebody has to look; 126 and 127, there is no such command;
# 129, 130 and 143, it was asked to end.
# SUPERVISE_PAUSE: seconds before the next start (5).

asked=
trap 'asked=1; kill -TERM "$child" 2>/dev/null' TERM INT
while :; do
    "$@" &
    child=$!
    wait "$child"
    status=$?
    if [ -n "$asked" ]; then                      # the first wait was ended by the signal
        wait "$child" 2>/dev/null
        exit 143
    fi
    case $status in
        0|2|4|126|127|129|130|143) exit "$status" ;;
    esac
    echo "supervise: ended with status $status; started again in ${SUPERVISE_PAUSE:-5} s" >&2
    sleep "${SUPERVISE_PAUSE:-5}"
done
