"""One server: started, followed, judged, ended. Runs inside the supervisor: stdlib, psutil and filelock only."""
