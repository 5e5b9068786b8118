// Command etcd is etcd's server for the offline cluster of the end-to-end suite. It only calls the
// server's main function, because no released module contains etcd's main package in a form that
// can be built alone.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
