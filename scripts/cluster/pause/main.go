// Pause holds a pod's namespaces open until it is told to end. It is the first process of a pod
// whose containers share their processes, so it reaps those that nobody else waits for.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 64)
	signal.Notify(signals, syscall.SIGCHLD, syscall.SIGINT, syscall.SIGTERM)
	for received := range signals {
		if received != syscall.SIGCHLD {
			return
		}
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); err != nil || pid <= 0 {
				break
			}
		}
	}
}
