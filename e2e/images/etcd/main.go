// Command etcd is the etcd server of the cluster that the end-to-end suite makes where no
// registry can be reached. It is the published server: etcd's own main package has no released
// module that can be built alone, so this one calls the same function.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
