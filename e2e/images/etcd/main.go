// Command etcd is the etcd server of the end-to-end suite's cluster when no registry can be
// reached. It is the published server: etcd's own main package is in no released module that can be
// built alone, so this program calls the same function.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
