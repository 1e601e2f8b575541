#!/usr/bin/env bash
# start_slurm.sh [FOLDER]: a Slurm of two nodes on this machine, gpu-a and gpu-b, for `make consoles` and CI; as root.
# Its files are in FOLDER, by default build/slurm; SLURM_CONF=FOLDER/slurm.conf scontrol shutdown ends it.
# Does nothing if it runs.
# Needs: apt-get install --no-install-recommends slurmd slurmctld slurm-client munge; without it, nothing is started.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v slurmctld >/dev/null || exit 0
folder=${1:-$PWD/build/slurm}
export SLURM_CONF=$folder/slurm.conf
if [ -f "$SLURM_CONF" ] && timeout 10 sinfo -h >/dev/null 2>&1; then exit 0; fi
rm -rf "$folder"
mkdir -p "$folder"/{state,gpu-a,gpu-b}
if ! pgrep -x munged >/dev/null; then
  [ -s /etc/munge/munge.key ] || dd if=/dev/urandom of=/etc/munge/munge.key bs=1 count=1024 2>/dev/null
  mkdir -p /run/munge
  chown munge /etc/munge/munge.key /run/munge
  chmod 400 /etc/munge/munge.key
  su -s /bin/sh munge -c "/usr/sbin/munged --force"
fi
host=$(hostname -s)
cat >"$SLURM_CONF" <<END
ClusterName=lab
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=26817
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/%n
SlurmdPidFile=$folder/%n.pid
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdLogFile=$folder/%n.log
SlurmctldLogFile=$folder/slurmctld.log
ReturnToService=2
KillWait=3
NodeName=gpu-a NodeHostname=$host NodeAddr=127.0.0.1 Port=26818 CPUs=2 RealMemory=4000
NodeName=gpu-b NodeHostname=$host NodeAddr=127.0.0.1 Port=26819 CPUs=2 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=60 OverSubscribe=FORCE:4
END
slurmctld
for node in gpu-a gpu-b; do unshare --uts sh -c "hostname $node; exec slurmd -N $node"; done
for _ in {1..30}; do
  [ "$(sinfo -h -t idle -o %D)" = 2 ] && exit 0
  sleep 1
done
echo "Slurm's nodes are not idle after 30 s; see $folder/*.log" >&2
exit 1
