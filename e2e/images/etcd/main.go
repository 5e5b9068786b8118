// Command etcd is the etcd server of the end-to-end suite's cluster when no registry can be
// reached. It calls the main function of etcd's server; etcd's own main package is in no released
// module that can be built alone.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
